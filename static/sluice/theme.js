// Sets the theme before the first paint. The choice "auto" follows the system's setting, also when that changes.
(() => {
  const root = document.documentElement;
  if (root.dataset.themeChoice !== "auto") return;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => { root.dataset.bsTheme = dark.matches ? "dark" : "light"; };
  apply();
  dark.addEventListener("change", apply);
})();
