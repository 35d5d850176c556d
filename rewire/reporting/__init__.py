"""rewire.report: an HTML page about a model: its streams, what rewiring changed, learned and costs."""
