"""Imported before the checks of ``tools/gpu_check.py`` are forked: their engines are forked as well."""

from tests.forked_engines import use_forked_engines

use_forked_engines()
