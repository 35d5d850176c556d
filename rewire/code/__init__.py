"""The functions behind forwards: their text, and where in it something happens."""
