"""Forward passes of training: attention, matmuls, and the target over packed windows."""
