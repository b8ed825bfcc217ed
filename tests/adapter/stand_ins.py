"""Stand-ins for packages that are imported and never called, or of which a test brings the parts that are."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types


class _Named(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        return getattr(_Named, name) if name.startswith("__") else _Named(name, (), {})


class _StandsIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages):
        self._packages = packages

    def find_spec(self, name, path, target=None):
        ours = any(f"{each}.".startswith(f"{name}.") or name.startswith(f"{each}.") for each in self._packages)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


def stand_in(*packages):
    """Make these importable where they are not installed: every name in them is an empty class."""
    finder = _StandsIn(packages)
    sys.meta_path.append(finder)  # behind the finders of what is installed
    return finder


@contextlib.contextmanager
def standing_in(package):
    """`stand_in` for what is imported inside; afterwards the package is missing as before."""
    finder = stand_in(package)
    yield
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        del sys.modules[name]
