"""Parts of `rewrite`: `plan` decides what changes, `edits` are that as data, `write` and `apply` carry it out."""
