"""Trees of draft tokens: settings, expansion, drawing, merging."""
