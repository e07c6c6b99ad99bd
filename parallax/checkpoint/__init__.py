"""Save a run and load it again, in any layout: a checkpoint is a Hugging Face model and a few files beside it.

    step-00000100/
        model/          config.json, tokenizer files, model-00001-of-00002.safetensors ..., model.safetensors.index.json
        optimizer/      optimizer-00001-of-00004.safetensors ...: "<parameter name>.exp_avg", ".exp_avg_sq", ".main_param"
        state.json      the step, the optimizer's count of steps, and what the trainer wants to find again
        manifest.json   every file's size and checksum, every tensor's shape, type and place; written last

Tensors are whole: unsharded, without padding, under the names they have in every layout. Neither the ranks, nor ZeRO, nor
the buckets show in model/ and optimizer/, which are the same bytes whatever layout wrote them. Safetensors and JSON only: loading
never runs code.

    from parallax.checkpoint.save import save            # all ranks together
    from parallax.checkpoint.find import find_latest     # the newest that holds
    from parallax.checkpoint.load import load            # into any layout
    from parallax.checkpoint.verify import verify        # one process, without torch
"""
