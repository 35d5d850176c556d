"""`rewire.Backend` (in `dynamo`): rewires flat graphs that torch.compile captured."""

from rewire.backend.dynamo import Backend, by_name

__all__ = ["Backend", "by_name"]
