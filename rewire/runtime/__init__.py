"""What rewired models run: `stream` is what flows through a trunk, `connection` the module that holds its weights,
`depth` what one call of an edited forward talks to."""
