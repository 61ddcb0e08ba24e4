"""Where the teacher's distribution comes from: one small module a kind."""
