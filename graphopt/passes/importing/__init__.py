"""Phase ``importing``: what a file says in its exporter's way becomes what all other phases expect."""
