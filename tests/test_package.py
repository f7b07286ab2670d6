"""What importing does and does not do, and what a wrong build says."""

import importlib.metadata
import subprocess
import sys

import pytest

import jax_pcie
from jax_pcie import _ffi


def test_importing_touches_no_device() -> None:
    # A backend that exists refuses another number of devices.
    script = (
        "import jax, jax_pcie, jax_pcie.__main__\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert len(jax.devices('cpu')) == 3\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_version_is_the_installed_ones() -> None:
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    if "jax_pcie" in installed:
        assert jax_pcie.__version__ == importlib.metadata.version("jax_pcie")
    else:
        assert jax_pcie.__version__ == "unknown"


def test_an_extension_newer_than_jaxlib_is_refused_at_import() -> None:
    with pytest.raises(ImportError, match=r"built with XLA FFI API 0\.5.*has 0\.3"):
        _ffi.require_ffi_minor(built_with=5, runtime=3)


@pytest.mark.parametrize("runtime", [3, 4])
def test_an_extension_as_old_as_jaxlib_or_older_is_accepted(runtime: int) -> None:
    _ffi.require_ffi_minor(built_with=3, runtime=runtime)


def test_the_modules_say_which_ffi_they_were_built_with() -> None:
    module = _ffi.native_module("cpu")
    assert 3 <= module.ffi_api_minor <= _ffi.runtime_ffi_minor()


def test_other_platforms_are_refused_by_name() -> None:
    with pytest.raises(_ffi.PcieError, match="not on 'tpu' devices"):
        _ffi.native_module("tpu")
