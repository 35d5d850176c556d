"""Parts of `find`: flows of runs and traces, and the residual adds, chains and names in them."""
