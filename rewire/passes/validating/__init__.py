"""Parts of `validate`: runs of both models, and the comparison of their tensors."""
