"""What `validate` is made of: runs of both models, and the comparison of their graphs."""
