"""The built-in pipeline: feeds in, a calm and sorted brief out, with no hosted model."""
