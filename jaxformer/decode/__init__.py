"""Generation, beam search, scoring and embedding with a trained model.

Where to look: `api` (the public functions), `scheduler` (continuous batching), `slots` (the running batch), `loop` (the
compiled programs), `beam_search`, `cache`, `sampling` (settings of a request), `defaults` (the model's settings),
`text` (tokens to text and back), `scoring` (teacher-forced scores, logits, embeddings), `jobs` (the command line:
terminal output, file to file).
"""
