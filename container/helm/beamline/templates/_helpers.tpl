{{- define "beamline.name" -}}
{{- if contains "beamline" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-beamline" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "beamline.selector" -}}
app.kubernetes.io/name: beamline
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "beamline.labels" -}}
{{ include "beamline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "beamline.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "beamline.check" -}}
{{- $needed := add .Values.preStopSeconds .Values.drainDelay .Values.drainSeconds 5 }}
{{- if lt (int .Values.terminationGracePeriodSeconds) (int $needed) }}
{{- fail (printf "terminationGracePeriodSeconds is %d; with preStopSeconds, drainDelay, drainSeconds and 5 seconds it must be at least %d" (int .Values.terminationGracePeriodSeconds) $needed) }}
{{- end }}
{{- if and .Values.autoscaling.enabled .Values.keda.enabled }}
{{- fail "autoscaling.enabled and keda.enabled exclude each other: two autoscalers would fight over the replicas" }}
{{- end }}
{{- if and (eq .Values.models.source "volume") (not .Values.models.volume) }}
{{- fail "models.source is volume, but models.volume is empty: say which" }}
{{- end }}
{{- if and (eq .Values.models.source "ociImage") (not .Values.models.ociImage.reference) }}
{{- fail "models.source is ociImage, but models.ociImage.reference is empty: say which" }}
{{- end }}
{{- if and (eq .Values.models.source "init") (not .Values.models.init.image) }}
{{- fail "models.source is init, but models.init.image is empty: say which" }}
{{- end }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secretName) }}
{{- fail "tls.clientCertificates needs tls.secretName, whose ca.crt says whom to trust" }}
{{- end }}
{{- end }}
