@echo off
rem fdl COMMAND...: flodl from a checkout, on Windows. Finds a Python and hands over to tools\bootstrap, like ./fdl.
setlocal
set "root=%~dp0"
set "check=import sys; sys.exit(not sys.version_info[:2] >= (3, 11))"
if defined FDL_PYTHON (
  "%FDL_PYTHON%" -I -S -c "%check%" >nul 2>&1
  if errorlevel 1 goto missing
  set "python="%FDL_PYTHON%""
  goto found
)
set "python="%root%.venv\Scripts\python.exe""
%python% -I -S -c "%check%" >nul 2>&1
if not errorlevel 1 goto found
for %%v in (3.13 3.12 3.11 3.14) do (
  py -%%v -I -S -c "%check%" >nul 2>&1
  if not errorlevel 1 (
    set "python=py -%%v"
    goto found
  )
)
set "python=python"
%python% -I -S -c "%check%" >nul 2>&1
if not errorlevel 1 goto found
:missing
echo fdl: flodl needs Python 3.11 or newer, and none was found. 1>&2
echo fdl: Install one:  winget install --id Python.Python.3.13 1>&2
echo fdl: Or name one that is not on the PATH:  set FDL_PYTHON=C:\path\to\python.exe 1>&2
exit /b 1
:found
%python% -I -S -B "%root%tools\bootstrap" %*
exit /b %errorlevel%
