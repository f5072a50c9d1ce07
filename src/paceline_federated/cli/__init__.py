"""The command `paceline federate`."""
