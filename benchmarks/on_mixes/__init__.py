"""What mixes are timed beside: pieces of work, other libraries, and the table."""
