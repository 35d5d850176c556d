"""What `gpu.py` runs: jobs, each in a process of its own, and what is known of one GPU after them."""
