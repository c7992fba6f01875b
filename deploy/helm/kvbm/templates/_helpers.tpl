{{- define "kvbm.name" -}}
{{- printf "%s-kvbm" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvbm.selector" -}}
app.kubernetes.io/name: kvbm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvbm.labels" -}}
{{ include "kvbm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The pod's memory in MiB: the host tier of cpuGb * 1e9 bytes, and the engine's own. */}}
{{- define "kvbm.memory" -}}
{{- printf "%dMi" (add (ceil (mulf .Values.cache.cpuGb 953.674316)) (mul .Values.memory 1024)) -}}
{{- end -}}
