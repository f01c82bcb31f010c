"""Models written for other engines: a table of targets, one module for each.

Which module does which step:

    targets               `export_model` and the table `TARGETS`: a new exporter is a module beside it and a line in it
    folder                what targets share that are folders: config, tokenizer, shards
    compressed_tensors, mlx, torchao    a target each, by `folder`, which has plain folders itself
    gguf                  llama.cpp's target: names, order of rows, formats
    gguf_metadata, gguf_tokenizer                  what a GGUF file says beside the tensors; gpt-oss
    gguf_source           the way back: a GGUF file read as a Hugging Face folder; names in both directions
"""
