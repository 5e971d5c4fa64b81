"""``GatherTable``: columns of a packed matrix of codes; a tied embedding looked up in the matrix of its lm_head."""
