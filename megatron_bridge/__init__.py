"""Hugging Face checkpoints to and from Megatron-Core models.

One declarative table a model family (``megatron_bridge/families``) gives both directions and every shard::

    config = read_hf_config(folder)                                                        # hf_config.py
    architecture, gpt = transformer_config_kwargs(config), gpt_model_kwargs(config)        # plan.py
    frequencies = torch.tensor(gpt.pop("inverse_frequencies"))  # for the model's rotary_pos_emb.inv_freq
    TransformerConfig(**architecture, ...), GPTModel(..., **gpt)
    load_hf(chunks, folder)                                                                # convert.py
    save_hf(chunks, out, source=folder)                                                    # save.py
    Resharder(plan_model(chunks), roots, limit).assemble(index)  # a bucket of tensors    # reshard.py
    verify_hf_folder(out)                                                                  # hf_folder.py

No module of this package imports Megatron-Core, and this one imports nothing.
"""
