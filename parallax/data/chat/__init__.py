"""Chats as training samples: what the loss is taken of, and how samples become rows.

    file, line -> messages -> rendered text -> token ids with spans -> rows of seq_len
    files         records     hugging_face     encoded, store          parallax.data.packing
                              templates

The mask is made from positions in the rendered conversation, never by looking for tokens; docs/sft.md draws it.
"""
