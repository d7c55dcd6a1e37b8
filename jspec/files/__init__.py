"""What lies on disk: tensor files, model directories, draft heads, and writing them whole."""
