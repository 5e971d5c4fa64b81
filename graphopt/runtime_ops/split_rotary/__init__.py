"""``SplitRotary``: queries, keys and values of one product, the first two turned by positions."""
