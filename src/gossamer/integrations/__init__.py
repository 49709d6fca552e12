"""Other libraries' models with gossamer's operators: each module has `patch(obj)`, undone by `unpatch(obj)`."""

__all__: list[str] = []
