"""Methods: one file each holds the options of a training method and its loss."""
