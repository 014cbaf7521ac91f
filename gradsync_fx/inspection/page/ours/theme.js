// Before the first paint: the theme that was chosen last. Storage may be forbidden (files, private windows).
try {
  const chosen = localStorage.getItem("gradsync_fx.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* the system's theme, then */ }
