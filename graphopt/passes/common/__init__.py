"""What passes share: a pass imports these modules, and never another pass."""
