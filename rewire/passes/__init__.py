"""The passes of `rewire.compile`, in this order: prepare, find, choose, rewrite, validate."""
