"""Commands of the laboratory: `bench`, `chaos` and `config`."""
