"""The functions behind forwards: their source, and the places in it to which instructions belong."""
