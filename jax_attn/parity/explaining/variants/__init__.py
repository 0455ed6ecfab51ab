"""What people do in an operation's place: the catalogue of causes that are tried."""
