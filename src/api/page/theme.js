// Sets the theme before the first paint. A module would run too late and flash.
'use strict';
try {
  const settings = JSON.parse(localStorage.getItem('sterna-settings') ?? '{}');
  if (['light', 'dark'].includes(settings.theme)) {
    document.documentElement.dataset.theme = settings.theme;
  }
} catch {
  // Without stored settings the page follows the system's theme.
}
