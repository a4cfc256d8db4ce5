"""The bundled model `tales`: a Qwen2 of ten million parameters that writes story prose.

The steps, in the order in which they run; each is a subcommand of `python3 scripts/tales.py`:

  prepare    corpus.py    books -> paragraphs, some held out; a tokenizer; conversations; token arrays (CPU, tokenizers)
  train      train.py     token arrays -> weights, in a given number of seconds                        (GPU, torch)
  export     export.py    weights and tokenizer -> tales-f16.gguf                                      (CPU, gguf)
  reference  reference.py tales-f16.gguf -> logits and greedy tokens, confirmed by transformers        (CPU, torch)
"""
