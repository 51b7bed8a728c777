"""The OpenAI door: what programs that speak OpenAI's API ask becomes jobs like any other."""
