"""Training of drafters, and of the small models that jspec is shown with."""
