"""rewire.report: one HTML page of a model: its streams, what rewiring changed and learned, what it costs."""
