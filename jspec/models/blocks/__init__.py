"""Parts of a layer, one file a kind."""
