"""What `find` is made of: graphs of runs and traces, and the residual adds, chains and names in them."""
