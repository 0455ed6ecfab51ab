"""A Python of its own, in which the test's process has imported and set nothing."""

import os
import subprocess
import sys


def fresh_python(code, *arguments, devices=1, status=0):
    """Run code with arguments, on so many CPU devices; return its output."""
    flags = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr
