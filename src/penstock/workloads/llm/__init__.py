"""Language-model work: requests and results, the seam to what computes, and OpenAI batches."""
