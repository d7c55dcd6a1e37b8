"""Weight files: safetensors, torch files, and directories of them."""
