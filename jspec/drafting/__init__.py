"""What drafters are made of: shapes of trees, growing and drawing them, and joining two drafts."""
