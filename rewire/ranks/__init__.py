"""Ranks that train one model: whether they rewired it alike, and whether their connection weights stay alike."""
