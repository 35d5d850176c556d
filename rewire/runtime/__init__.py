"""What rewired models run: `stream` has the value that flows through a trunk, `connection` the module that holds the
trunk's weights, `depth` the object that an edited forward calls."""
