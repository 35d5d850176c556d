"""What `rewrite` is made of: `plan` says what changes, `edits` is that as data, `write` makes texts of it, `apply`
installs them."""
