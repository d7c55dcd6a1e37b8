"""Training for jspec: pre-training of small models, and (later) distillation of drafters."""
