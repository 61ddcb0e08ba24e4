"""From dataset rows to padded batches: rows -> messages -> tokens and labels -> batch."""
