"""Text to token ids, in worker processes, with the same result for any number of them.

    files -> blocks of whole records -> texts -> ids -> in the order of the files again
    sources  blocks                     encode          pool (worker)

A document's ids depend on its text alone, never on what lies beside it in a block.
"""
