"""Pictures of a run and of embeddings."""
